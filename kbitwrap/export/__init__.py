"""The original, or the merged model, as files."""
