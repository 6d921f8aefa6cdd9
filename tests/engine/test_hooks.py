"""absent.py: copies and pickles of links and hooks are empty, and hooks keep nobody alive."""

import copy
import gc
import pickle
import weakref

from fastpar.engine.absent import Hook, Link


class Owner:
    def __init__(self):
        self.calls = []

    def called(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return "result"


def test_copies_are_empty():
    owner = Owner()
    link, hook = Link(owner), Hook(weakref.ref(owner), Owner.called, 1)
    assert hook(2, key=3) == "result"
    for make in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        assert make(link).target is None
        assert make(hook)(2, key=3) is None
    assert owner.calls == [((1, 2), {"key": 3})]
    assert hook.is_of(owner)
    assert not hook.is_of(Owner())
    assert not copy.copy(hook).is_of(owner)


def test_a_hook_keeps_nobody_alive():
    owner = Owner()
    hook, gone = Hook(weakref.ref(owner), Owner.called), weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
    assert hook() is None
