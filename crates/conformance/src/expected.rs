//! What the suite expects of error texts and times: one list that the cases check by, and that the header of plugins and
//! `docs/plugins.md` repeat (a test of crate `plugin` compares them).

use std::time::{Duration, Instant};

use ftcore::{Error, ErrorKind};

use crate::failure::{Failure, Outcome};

/// What an error has to say after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text {
    /// What happened, to whom.
    pub event: &'static str,
    /// The error's kind.
    pub kind: ErrorKind,
    /// What the error's text contains, as whole words. N, TAG, A and B stand for numbers, REASON, CAUSE, ONE, OTHER and RANKS for texts that the case
    /// gave.
    pub parts: &'static [&'static str],
}

/// How long something may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Time {
    /// What takes the time, from what on.
    pub what: &'static str,
    /// The longest that passes, with room for a machine that is busy.
    pub at_most: Duration,
}

/// See [`TEXTS`].
pub(crate) const ABORTED_HERE: Text = Text {
    event: "abort(REASON), on the rank that called it",
    kind: ErrorKind::Aborted,
    parts: &["REASON"],
};
pub(crate) const ABORTED_ELSEWHERE: Text = Text {
    event: "abort(REASON) on rank N, on the other ranks",
    kind: ErrorKind::Aborted,
    parts: &["REASON", "rank N"],
};
pub(crate) const POISONED: Text = Text {
    event: "a call on a group that is poisoned by CAUSE",
    kind: ErrorKind::Poisoned,
    parts: &["CAUSE"],
};
pub(crate) const DEADLINE: Text = Text {
    event: "the deadline of a collective passed",
    kind: ErrorKind::Timeout,
    parts: &["rank"],
};
pub(crate) const RECEIVE_DEADLINE: Text = Text {
    event: "the deadline of a receive from rank N with tag TAG passed",
    kind: ErrorKind::Timeout,
    parts: &["rank N", "TAG"],
};
pub(crate) const MISSING: Text = Text {
    event: "configure without rank N",
    kind: ErrorKind::Timeout,
    parts: &["rank N of", "phase"],
};
pub(crate) const CANCELLED: Text = Text {
    event: "configure cancelled for REASON",
    kind: ErrorKind::Aborted,
    parts: &["REASON"],
};
pub(crate) const SIZES: Text = Text {
    event: "two ranks expect A and B bytes of one message",
    kind: ErrorKind::Mismatch,
    parts: &["A bytes", "B bytes"],
};

pub(crate) const DIFFERENT: Text = Text {
    event: "ranks call ONE and OTHER: the operation's name, `N elements`, the name of the type or of the reduction, or `root R`, whichever differs",
    kind: ErrorKind::Mismatch,
    parts: &["ONE", "OTHER"],
};
pub(crate) const MESSAGE: Text = Text {
    event: "a message is of ONE, and its receive of OTHER, each `N elements of TYPE`; on both ranks",
    kind: ErrorKind::Mismatch,
    parts: &["ONE", "OTHER"],
};
pub(crate) const ABSENT: Text = Text {
    event: "a monitored barrier at its deadline, without RANKS: `rank R`, or `ranks R, S`",
    kind: ErrorKind::Timeout,
    parts: &["RANKS"],
};

/// The texts that the suite checks.
pub const TEXTS: [Text; 11] = [
    ABORTED_HERE,
    ABORTED_ELSEWHERE,
    POISONED,
    DEADLINE,
    RECEIVE_DEADLINE,
    MISSING,
    CANCELLED,
    SIZES,
    DIFFERENT,
    MESSAGE,
    ABSENT,
];

const fn time(what: &'static str, seconds: u64) -> Time {
    Time {
        what,
        at_most: Duration::from_secs(seconds),
    }
}

pub(crate) const AFTER_ABORT: Time = time(
    "from an abort to the end of pending work, here and on other ranks",
    5,
);
pub(crate) const AFTER_DEADLINE: Time = time(
    "from the start of an operation whose deadline is soon to its end",
    10,
);
pub(crate) const AFTER_DEATH: Time = time("from the death of a rank to the end of the others' work", 10);
pub(crate) const AFTER_CANCEL: Time = time("from the start of a configure that is cancelled to its end", 15);
pub(crate) const CASE: Time = time("from the start of a case to its end on every rank", 90);

/// The times that the suite allows.
pub const TIMES: [Time; 5] = [AFTER_ABORT, AFTER_DEADLINE, AFTER_DEATH, AFTER_CANCEL, CASE];

impl Text {
    /// Checks kind and text; `given` is what stands for the names in capitals.
    pub(crate) fn check(&self, error: &Error, given: &[(&str, &str)]) -> Outcome {
        ensure!(
            error.kind() == self.kind,
            "{}: the error is {:?} instead of {:?}: {error}",
            self.event,
            error.kind(),
            self.kind
        );
        let text = error.to_string();
        for part in self.parts {
            let filled = |word: &str| {
                given
                    .iter()
                    .find(|(name, _)| *name == word)
                    .map(|(_, value)| *value)
            };
            let words: Vec<&str> = part.split(' ').map(|word| filled(word).unwrap_or(word)).collect();
            let part = words.join(" ");
            ensure!(
                says(&text, &part),
                "{}: the error does not say '{part}': {text}",
                self.event
            );
        }
        Ok(())
    }
}

/// Whether `text` has `words` for themselves: "reduce" is not said by "all_reduce" or "reduce_scatter", nor "rank 2" by "rank 23"; "rank" is by "ranks".
fn says(text: &str, words: &str) -> bool {
    let joins = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(words).any(|(at, found)| {
        let before = text.get(..at).and_then(|before| before.chars().next_back());
        let after = text
            .get(at + found.len()..)
            .and_then(|after| after.chars().next());
        !before.is_some_and(joins) && !after.is_some_and(|c| joins(c) && !c.is_alphabetic())
    })
}

impl Time {
    /// Fails if more time has passed.
    pub(crate) fn check(&self, began: Instant) -> Outcome {
        let took = began.elapsed();
        if took <= self.at_most {
            return Ok(());
        }
        Err(Failure::new(format!(
            "{}: it took {took:?}, {} s are allowed",
            self.what,
            self.at_most.as_secs()
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_as_whole_ones() {
        assert!(says("rank 0 calls reduce(f32, 10 elements)", "reduce"));
        assert!(says("barrier", "barrier") && says("ranks 2, 3 are missing", "rank"));
        for (text, words) in [
            ("all_reduce of f32", "reduce"),
            ("reduce_scatter", "reduce"),
            ("monitored_barrier", "barrier"),
            ("rank 23", "rank 2"),
            ("110 elements", "10 elements"),
            ("", "rank"),
        ] {
            assert!(!says(text, words), "{words} in {text}");
        }
    }

    #[test]
    fn kind_and_every_part_of_the_text_are_checked_with_what_the_case_gave() {
        let given = [("N", "1"), ("TAG", "17")];
        let error = |text: &str| Error::new(ErrorKind::Timeout, text);
        assert!(
            RECEIVE_DEADLINE
                .check(&error("rank 1 sent nothing with tag 17"), &given)
                .is_ok()
        );
        for wrong in [
            error("rank 2 sent nothing with tag 17"),
            error("rank 1 sent nothing"),
            Error::new(ErrorKind::Aborted, "rank 1 sent nothing with tag 17"),
        ] {
            assert!(RECEIVE_DEADLINE.check(&wrong, &given).is_err(), "{wrong}");
        }
        assert!(
            SIZES
                .check(
                    &Error::new(ErrorKind::Mismatch, "20 bytes here"),
                    &[("A", "20"), ("B", "16")]
                )
                .is_err()
        );
    }
}
