"""The paper's experiments, one module each: settings in, rows and pictures out."""
