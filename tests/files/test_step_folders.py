"""Names of checkpoints' folders."""

from fastpar.files.step_folders import checkpoint_folder, list_checkpoints, step_of


def test_folders_are_listed_by_step(tmp_path):
    for step in (1_000_000, 3, 200):
        checkpoint_folder(tmp_path, step).mkdir(parents=True)
    for other in (".step_000009.1a.tmp", "step_12", "step_0000x1", "else"):
        (tmp_path / "checkpoints" / other).mkdir()
    (tmp_path / "checkpoints" / "step_000010").touch()
    assert [step_of(path) for path in list_checkpoints(tmp_path)] == [3, 200, 1_000_000]
    assert list_checkpoints(tmp_path / "none") == []
