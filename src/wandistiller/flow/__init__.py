"""The flow: one convention, in one place, as tensor mathematics without models.

``sigma`` runs from 1 (pure noise) to 0 (data); ``noisy = (1 - sigma) * data + sigma * noise``; the model predicts
``velocity = noise - data`` and is told the timestep ``1000 * sigma``.
"""
