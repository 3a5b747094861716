//! Is gloo usable here? It needs a TCP socket and an eventfd, nothing else.

use std::net::{Ipv4Addr, TcpListener};

use ftcore::{Error, Result};

/// `Ok`, or what is missing.
pub(crate) fn probe() -> Result<()> {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .map_err(|e| Error::io("gloo cannot listen on the loopback address", e))?;
    crate::transport::waker::Waker::new().map(drop)
}
