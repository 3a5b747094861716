//! The one-thread rule: several ranks share a machine's cores, and sums split over threads are not repeatable.

use ftcore::{Error, ErrorKind, Result};

/// Fails with `ErrorKind::InvalidState` unless this process computes on one thread, as `RAYON_NUM_THREADS=1` in its
/// environment gives. Read from the environment only, because a process cannot safely change it once it has threads.
pub fn require_one_compute_thread() -> Result<()> {
    check(candle_core::utils::get_num_threads())
}

fn check(threads: usize) -> Result<()> {
    if threads == 1 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidState,
        format!(
            "candle would compute on {threads} threads; set RAYON_NUM_THREADS=1 in this rank's environment before it starts"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_one_compute_thread_is_refused_and_the_variable_named() {
        assert!(check(1).is_ok());
        let e = check(2).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::InvalidState);
        assert!(
            e.to_string().contains("on 2 threads; set RAYON_NUM_THREADS=1"),
            "{e}"
        );
    }
}
