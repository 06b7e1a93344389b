"""What can be taken out: rows as CSV or Parquet, pictures, a page or a run as one HTML file."""
