//! The integration tests that need no process of their own, as one program: it is linked once.

mod agreement;
mod backup;
mod closing;
mod eager;
mod feedback;
mod published;
mod retries;
mod rounds;
mod scripted;
mod stochastic;
mod weights;
