"""Check the pages: commands run, links lead somewhere, lists are complete."""
