//! The integration tests that need no process of their own, as one program: it is linked once.

mod groups;
mod layout_groups;
mod layouts;
mod matched;
mod members;
mod objects;
