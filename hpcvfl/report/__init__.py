"""What a person sees: progress, tables, plots. Imports neither torch nor MPI."""
