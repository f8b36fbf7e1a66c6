"""The explorer: a local web server, the views it shows, and the page of a run. Knows no kind of record."""
