//! What a rank expects of the header before a payload, and what it says if something else comes (L15).

use ftcore::{Epoch, Error, ErrorKind, Fingerprint, Result};

use crate::port::Port;
use crate::schedule::Algorithm;
use crate::wire::DataHeader;

/// The ranks called different things: names both.
pub(crate) fn mismatch(port: &Port, header: &DataHeader, own: Fingerprint) -> Error {
    port.error(
        ErrorKind::Mismatch,
        format!(
            "the ranks called different collectives: rank {} called {}, this rank {}",
            port.rank, header.fingerprint, own
        ),
    )
}

/// What a receive expects of the header before its payload.
pub(crate) struct Expected {
    pub(crate) epoch: Epoch,
    pub(crate) seq: u64,
    pub(crate) round: usize,
    pub(crate) algorithm: Algorithm,
    pub(crate) fingerprint: Fingerprint,
    pub(crate) length: u64,
}

pub(crate) fn check_header(header: &DataHeader, expected: &Expected, port: &Port) -> Result<()> {
    let Expected {
        epoch, seq, round, ..
    } = expected;
    if header.epoch != *epoch {
        return Err(port.error(
            ErrorKind::Protocol,
            format!("sent a frame of epoch {}; this is epoch {epoch}", header.epoch),
        ));
    }
    if header.seq != *seq {
        return Err(port.error(
            ErrorKind::Protocol,
            format!("sent a frame of operation #{}; expected #{seq}", header.seq),
        ));
    }
    if header.fingerprint != expected.fingerprint || header.algorithm != expected.algorithm as u32 {
        return Err(mismatch(port, header, expected.fingerprint));
    }
    if header.round as usize != *round {
        return Err(port.error(
            ErrorKind::Protocol,
            format!("sent a frame of round {}; expected round {round}", header.round),
        ));
    }
    if header.length != expected.length {
        return Err(port.error(
            ErrorKind::Mismatch,
            format!(
                "the ranks disagree about sizes: rank {} called {} and sends {} bytes to this rank, which called {} and \
                 expects {} bytes from it",
                port.rank, header.fingerprint, header.length, expected.fingerprint, expected.length
            ),
        ));
    }
    Ok(())
}
