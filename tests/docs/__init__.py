"""The pages hold: their commands run, their links lead somewhere, their lists are complete."""
