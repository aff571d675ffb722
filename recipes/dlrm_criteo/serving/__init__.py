"""Serve the job's model over HTTP: ``app.py`` answers, ``question.py`` says what may be asked."""
