"""The trace store on disk: shards, manifest and sidecar; writing, reading, repair and rewriting."""
