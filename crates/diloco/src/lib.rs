//! LocalSGD, DiLoCo and Streaming DiLoCo over plain slices.
