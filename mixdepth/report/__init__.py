"""Pages and plots for people to look at. They are made of files and values; nothing is computed by a model here."""
