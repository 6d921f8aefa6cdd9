"""What a run and a model are: settings that check themselves."""
