"""Tables and plots of single pages, one module per page, from results/."""
