//! Work for others, beside a training that wants the cores itself.

/// How much less this thread and those that it starts want the processor than their process does. Linux gives one of them 3.4 % of a core that a thread
/// of the training wants as a whole (a weight of 36 against 1,024), and all that the training leaves.
const NICER: i32 = 15;

/// Lets the threads of the training go first: what sends a state, or hashes it, takes what they leave.
pub(crate) fn yield_to_training() {
    // Of this thread alone: that is what Linux takes the process 0 for. A system that refuses is no worse off than before.
    if let Ok(now) = rustix::process::getpriority_process(None) {
        let _ = rustix::process::setpriority_process(None, now.saturating_add(NICER).min(19));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_thread_yields_and_no_other_one_does() {
        let own = || rustix::process::getpriority_process(None).unwrap();
        let before = own();
        let there = std::thread::spawn(move || {
            yield_to_training();
            own()
        });
        assert_eq!(there.join().unwrap(), (before + NICER).min(19));
        assert_eq!(own(), before);
    }
}
