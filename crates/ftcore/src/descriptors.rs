//! How many files and sockets this process may have open. The usual soft limit (1,024) is for programs that use `select`; a server of thousands of
//! connections needs what the administrator allows, the hard limit. It is raised before it is met, and named as what it is once that is reached.

use std::os::fd::AsRawFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{Error, ErrorKind};

/// What a configuration needs beside what it needs for each rank.
const BASE: u64 = 64;
/// What it needs for each rank, for as long as it connects.
const PER_RANK: u64 = 8;

/// Raises this process's limit of open files (`RLIMIT_NOFILE`) from its soft to its hard value and returns what it is then.
/// Processes started from here inherit it.
pub fn raise_descriptor_limit() -> usize {
    raise();
    // None is no limit.
    let now = getrlimit(Resource::Nofile).current;
    now.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// Raises the limit to the hard limit. True if there is room for a descriptor now: what met the limit is worth another try, also where another
/// thread has raised it meanwhile.
pub fn raise() -> bool {
    raise_for(1)
}

/// As [`raise`], for `count` descriptors at once.
pub fn raise_for(count: usize) -> bool {
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
    if more && let Err(error) = setrlimit(Resource::Nofile, new) {
        tracing::warn!(%error, "the limit of open files (RLIMIT_NOFILE) could not be raised");
    }
    has_room(count)
}

/// What `make` gives. Where it meets the limit that is raised, and it has a second try.
pub fn with_room<T>(make: impl Fn() -> std::io::Result<T>) -> std::io::Result<T> {
    match make() {
        Err(error) if is_limit(&error) && raise() => make(),
        other => other,
    }
}

/// Makes them, to see: others in this process may take what the limit allows, and it may be the machine's that is met.
fn has_room(count: usize) -> bool {
    let one = |_| eventfd(0, EventfdFlags::CLOEXEC).ok();
    (0..count).map(one).collect::<Option<Vec<_>>>().is_some()
}

/// Raises the limit if a configuration of `world` ranks may come near it. `newest`: a descriptor that was just made; the kernel gives the lowest
/// number that is free, so at least so many are in use.
pub fn make_room(newest: &impl AsRawFd, world: u32) {
    let newest = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
    let needed = newest + BASE + PER_RANK * u64::from(world);
    let limit = getrlimit(Resource::Nofile).current;
    // Half of it is for what the rest of the process does meanwhile.
    if limit.is_some_and(|limit| needed > limit / 2) {
        raise();
    }
}

/// True if the operating system refused because of a limit on descriptors.
pub fn is_limit(error: &std::io::Error) -> bool {
    let limits = [Errno::MFILE, Errno::NFILE].map(|e| Some(e.raw_os_error()));
    limits.contains(&error.raw_os_error())
}

/// The same of an error that has one as its source.
pub fn is_limit_of(error: &Error) -> bool {
    let source = std::error::Error::source(error);
    source
        .and_then(|source| source.downcast_ref())
        .is_some_and(is_limit)
}

/// What to say where it did. `what` was not possible.
pub fn reached(what: &str) -> Error {
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
pub fn named(error: Error) -> Error {
    match is_limit_of(&error) {
        true => reached(error.message().split(':').next().unwrap_or_default()),
        false => error,
    }
}

/// What to say when a connection could not be accepted: if the limit of open files is what was reached, it is named.
pub fn accept_failure(error: &std::io::Error) -> String {
    match is_limit(error) {
        true => reached("accepting a connection").message().to_owned(),
        false => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_one_and_a_reached_limit_is_named() {
        let hard = getrlimit(Resource::Nofile).maximum;
        let now = raise_descriptor_limit();
        assert_eq!(getrlimit(Resource::Nofile).current, hard);
        assert_eq!(now, hard.map_or(usize::MAX, |n| n as usize));
        // Who met the old limit just before tries again.
        assert!(raise() && raise_for(4));
        let text = accept_failure(&std::io::Error::from(Errno::MFILE));
        assert!(
            text.contains("RLIMIT_NOFILE") && text.contains("ulimit"),
            "{text}"
        );
        let other = accept_failure(&std::io::Error::from(Errno::CONNABORTED));
        assert!(!other.contains("RLIMIT_NOFILE"), "{other}");
    }

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
