"""The analyses, one a file: definition and source, `run(*stores, ...) -> Table`, `plot(Table)`."""
