//! How many files and sockets this process may have open. The usual soft limit (1,024) is for programs that use `select`; a server of thousands of
//! connections needs what the administrator allows, the hard limit.

use std::sync::OnceLock;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises this process's limit of open files (`RLIMIT_NOFILE`) from its soft to its hard value, once, and returns what it is then.
/// Processes started from here inherit it.
pub fn raise_descriptor_limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let before = getrlimit(Resource::Nofile);
        let wanted = Rlimit {
            current: before.maximum,
            maximum: before.maximum,
        };
        if before.current != before.maximum
            && let Err(error) = setrlimit(Resource::Nofile, wanted)
        {
            tracing::warn!(%error, "the limit of open files (RLIMIT_NOFILE) could not be raised");
        }
        // None is no limit.
        let now = getrlimit(Resource::Nofile).current;
        now.map_or(usize::MAX, |n| usize::try_from(n).unwrap_or(usize::MAX))
    })
}

/// What to say when a connection could not be accepted: if the limit of open files is what was reached, it is named.
pub fn accept_failure(error: &std::io::Error) -> String {
    let too_many = [rustix::io::Errno::MFILE, rustix::io::Errno::NFILE].map(rustix::io::Errno::raw_os_error);
    if !error.raw_os_error().is_some_and(|code| too_many.contains(&code)) {
        return error.to_string();
    }
    let limit = getrlimit(Resource::Nofile).current;
    let limit = limit.map_or_else(|| "unlimited".to_owned(), |n| n.to_string());
    format!(
        "{error}: the limit of open files (RLIMIT_NOFILE, here {limit}) is reached; raise it with `ulimit -n`"
    )
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
        let text = accept_failure(&std::io::Error::from(rustix::io::Errno::MFILE));
        assert!(
            text.contains("RLIMIT_NOFILE") && text.contains("ulimit"),
            "{text}"
        );
        let other = accept_failure(&std::io::Error::from(rustix::io::Errno::CONNABORTED));
        assert!(!other.contains("RLIMIT_NOFILE"), "{other}");
    }
}
