//! Gloo as a whole: ranks as threads over real sockets. What every backend must do is in `conformance`; here stands what is
//! gloo's own: lifecycle, resources, hostile connections, and the lessons behind them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod ahead;
mod blocking;
mod credentials;
mod encryption;
mod groups;
mod hostile;
mod layers;
mod lifecycle;
mod links;
mod many;
mod messages;
mod rails;
mod ranks;
mod rates;
mod recorded;
mod resources;
mod turns;
