"""Control laws of the elastic parts of a run. Pure: they see readings and say what is wanted."""
