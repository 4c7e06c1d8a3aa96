"""One file per library; each holds its `ENTRIES` and imports the library only when one of them is made."""
