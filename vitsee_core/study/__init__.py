"""A study: from models and images to stores, results and a report, in steps that are commands."""
