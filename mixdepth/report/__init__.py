"""What people look at: the routing page, plots, the demo's report. They read files and values; nothing is trained."""
