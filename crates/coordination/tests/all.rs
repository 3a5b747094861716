//! The integration tests that need no process of their own, as one program: it is linked once.

mod dashboard;
mod lighthouse_port;
mod liveness;
mod operator;
mod quorums;
mod rig;
mod several;
