"""The analyses, one per file: definition and source, `run(*stores, ...) -> Table`,
`plot(Table)`."""
