"""Veda: routes by a trained predictor's tile scores."""
