"""Pipelines: schedules as data, their simulator, the cut of a model into stages."""
