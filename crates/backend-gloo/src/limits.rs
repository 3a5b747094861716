//! The limit on descriptors of a process: raised to the hard limit before it is met, and named as what it is once that is reached.

use std::os::fd::AsRawFd;

use ftcore::{Error, ErrorKind};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// What a configuration needs beside what it needs for each rank.
const BASE: u64 = 64;
/// What it needs for each rank, for as long as it connects.
const PER_RANK: u64 = 8;

/// Raises the limit if a configuration of `world` ranks may come near it. `newest`: a descriptor that was just made; the kernel gives the lowest
/// number that is free, so at least so many are in use.
pub(crate) fn make_room(newest: &impl AsRawFd, world: u32) {
    let newest = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    let needed = newest + BASE + PER_RANK * u64::from(world);
    let limit = getrlimit(Resource::Nofile).current;
    // Half of it is for what the rest of the process does meanwhile.
    if limit.is_some_and(|limit| needed > limit / 2) {
        raise();
    }
}

/// Raises the limit to the hard limit. True if that was higher.
pub(crate) fn raise() -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let more = match (current, maximum) {
        (Some(current), Some(maximum)) => current < maximum,
        (Some(_), None) => true,
        (None, _) => false,
    };
    let new = Rlimit {
        current: maximum,
        maximum,
    };
    if !more {
        return false;
    }
    let raised = setrlimit(Resource::Nofile, new);
    tracing::debug!(
        ?current,
        ?maximum,
        ok = raised.is_ok(),
        "the limit on descriptors is raised"
    );
    raised.is_ok()
}

/// True if the operating system refused because of a limit on descriptors.
pub(crate) fn is_limit(error: &std::io::Error) -> bool {
    let limits = [Errno::MFILE, Errno::NFILE].map(|e| Some(e.raw_os_error()));
    limits.contains(&error.raw_os_error())
}

/// The same of an error that has one as its source.
pub(crate) fn is_limit_of(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    source
        .and_then(|source| source.downcast_ref())
        .is_some_and(is_limit)
}

/// What to say where it did. `what` was not possible.
pub(crate) fn reached(what: &str) -> Error {
    let text = match getrlimit(Resource::Nofile).current {
        Some(limit) => format!(
            "{what}: this process has no file descriptor left; it may have {limit} (RLIMIT_NOFILE, already at the hard limit). Raise the hard \
             limit (ulimit -Hn, LimitNOFILE=), or close what is not needed"
        ),
        None => format!("{what}: this machine has no file descriptor left (fs.file-max)"),
    };
    Error::new(ErrorKind::Io, text)
}

/// `error`, or what to say if it comes of a limit on descriptors.
pub(crate) fn named(error: Error) -> Error {
    match is_limit_of(&error) {
        true => reached(error.message().split(':').next().unwrap_or_default()),
        false => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_limit_on_descriptors_is_named_as_one() {
        let refused = |errno: Errno| Error::io("creating an eventfd", errno.into());
        let named = named(refused(Errno::MFILE));
        assert!(named.to_string().contains("no file descriptor left"), "{named}");
        assert!(named.to_string().contains("creating an eventfd"), "{named}");
        let other = super::named(refused(Errno::NOMEM));
        assert!(!other.to_string().contains("descriptor left"), "{other}");
    }
}
