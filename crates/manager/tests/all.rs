//! The integration tests that need no process of their own, as one program: it is linked once.

mod addresses;
mod ahead;
mod attempts;
mod credentials;
mod event_log;
mod healing;
mod lost_answers;
mod meeting;
mod outside;
mod over_group;
mod ranks;
mod steps;
