"""`report`: one HTML page about a checkpoint. `data` collects, `figures` draws, `page` writes."""
