//! Who calls over which connections, and whose have all ended: of a replica without a stream, as torchft's are, that is the evidence of its death.
//!
//! A client that connects anew after an error, or has several connections, is not dead: its connections must all have been ended from its side, and none
//! may come within [`GRACE`]. A killed process's kernel closes them all at once.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

/// How long a replica may be without a connection. torchft's managers send a heartbeat ten times a second, and connect anew for it.
pub(super) const GRACE: Duration = Duration::from_millis(500);

/// The connections by replica id, and the reverse.
#[derive(Debug, Default)]
pub(super) struct Callers {
    lines: HashMap<String, BTreeSet<u64>>,
    ids: HashMap<u64, Vec<String>>,
    /// Ids without a connection, and when their grace is over, oldest first.
    without: Vec<(Instant, String)>,
}

impl Callers {
    /// `id` calls over the connection `line`.
    pub(super) fn call(&mut self, line: u64, id: String) {
        self.lines.entry(id.clone()).or_default().insert(line);
        self.ids.entry(line).or_default().push(id);
    }

    /// The connection has ended, `by_peer` or because the lighthouse closed it, which is evidence of nothing.
    pub(super) fn ended(&mut self, line: u64, by_peer: bool, now: Instant) {
        for id in self.ids.remove(&line).unwrap_or_default() {
            let Some(lines) = self.lines.get_mut(&id) else {
                continue;
            };
            lines.remove(&line);
            if lines.is_empty() {
                self.lines.remove(&id);
                if by_peer {
                    self.without.push((now + GRACE, id));
                }
            }
        }
    }

    /// Those whose grace is over and who have not connected again.
    pub(super) fn gone(&mut self, now: Instant) -> Vec<String> {
        let over = self.without.iter().take_while(|(until, _)| *until <= now).count();
        let over: Vec<String> = self.without.drain(..over).map(|(_, id)| id).collect();
        over.into_iter()
            .filter(|id| !self.lines.contains_key(id))
            .collect()
    }

    /// What has ended until now is no evidence.
    pub(super) fn forgive(&mut self) {
        self.without.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replica_is_gone_once_all_its_connections_have_ended_and_none_came_within_the_grace() {
        let (mut callers, start) = (Callers::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        callers.call(1, "a".into());
        callers.call(2, "a".into());
        callers.call(3, "b".into());
        callers.ended(1, true, at(0));
        assert_eq!(callers.gone(at(10_000)), [""; 0], "a has another");
        callers.ended(2, true, at(10_000));
        callers.ended(3, true, at(10_100));
        assert_eq!(callers.gone(at(10_400)), [""; 0]);
        // b comes back in time.
        callers.call(4, "b".into());
        assert_eq!(callers.gone(at(10_550)), ["a"]);
        assert_eq!(callers.gone(at(20_000)), [""; 0]);
        // What the lighthouse closed itself says nothing, nor does what it did not see because it was away.
        callers.ended(4, false, at(20_000));
        callers.call(5, "c".into());
        callers.ended(5, true, at(20_000));
        callers.forgive();
        assert_eq!(callers.gone(at(30_000)), [""; 0]);
        assert!(callers.lines.is_empty() && callers.ids.is_empty() && callers.without.is_empty());
    }
}
