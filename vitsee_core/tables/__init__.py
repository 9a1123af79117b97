"""Result tables: columns, file formats, replicates and one-line headlines."""
