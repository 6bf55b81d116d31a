"""Entrances that users of nvFuser know by these names."""
