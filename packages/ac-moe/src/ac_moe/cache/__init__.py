"""What a checkpointed block keeps of its MoE layers for the recompute, and how the recompute is served."""
