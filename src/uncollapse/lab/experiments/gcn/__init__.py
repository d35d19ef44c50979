"""Deep graph networks on node classification."""
