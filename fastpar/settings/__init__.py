"""All settings of a run and a model: dataclasses that check themselves."""
