//! The integration tests that need no process of their own, as one program: it is linked once.

mod closing;
mod feedback;
mod order;
mod sampler;
mod state;
mod steps;
