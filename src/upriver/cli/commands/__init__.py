"""One module for each ``upriver`` command, imported when it is called. ``upriver.cli.GROUPS`` lists them."""
