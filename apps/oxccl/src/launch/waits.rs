//! What the replicas wait for, asked of the lighthouse once none of them has said anything for a while.

use std::sync::Arc;
use std::time::{Duration, Instant};

use oxccl::coordination::LighthouseClient;
use oxccl::core::{Result, deadline_in};
use oxccl::identity::Party;

/// After such a silence it is asked, and after ever longer ones as long as the silence lasts.
const SILENCE: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_secs(5 * 60);
/// How long the lighthouse may take: the run is not looked after meanwhile.
const ANSWER: Duration = Duration::from_secs(1);

pub(super) struct Waits {
    party: Option<Arc<Party>>,
    client: Option<LighthouseClient>,
    pause: Duration,
    due: Instant,
}

impl Waits {
    /// `client` of the lighthouse, if it is connected already.
    pub(super) fn new(party: Option<Arc<Party>>, client: Option<LighthouseClient>) -> Self {
        Self {
            party,
            client,
            pause: SILENCE,
            due: deadline_in(SILENCE),
        }
    }

    /// A replica has said something.
    pub(super) fn heard(&mut self) {
        self.pause = SILENCE;
        self.due = deadline_in(SILENCE);
    }

    /// What they wait for and what would free them, if that is to be said now.
    pub(super) fn ask(&mut self, lighthouse: &str) -> Option<String> {
        if Instant::now() < self.due {
            return None;
        }
        // Another lighthouse than ours may not answer that; it is asked again then, ever less often.
        let said = self.answer(lighthouse).ok().flatten();
        self.pause = (self.pause * 2).min(LONGEST);
        self.due = deadline_in(self.pause);
        said
    }

    fn answer(&mut self, lighthouse: &str) -> Result<Option<String>> {
        let deadline = deadline_in(ANSWER);
        let client = match self.client.take() {
            Some(client) => client,
            None => LighthouseClient::connect_as(self.party.clone(), lighthouse, deadline)?,
        };
        let status = client.status(deadline);
        self.client = Some(client);
        let status = status?;
        let why = status.explain();
        // A program may have no use for the lighthouse.
        let asks = !status.waiting.is_empty() || !status.participants.is_empty();
        Ok((why.stuck && asks).then(|| format!("{}; {}", why.text, why.frees)))
    }
}

#[cfg(test)]
mod tests {
    use oxccl::coordination::{LighthouseConfig, LighthouseServer, Member};
    use oxccl::core::Step;

    use super::*;

    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_silent_run_says_whom_its_replicas_wait_for() {
        let lighthouse = LighthouseServer::start(LighthouseConfig {
            bind: "127.0.0.1:0".into(),
            min_replicas: 2,
            ..LighthouseConfig::default()
        })
        .unwrap();
        let url = lighthouse.address();
        let mut waits = Waits::new(None, None);
        let after_silence = |waits: &mut Waits| {
            waits.due = Instant::now();
            waits.ask(&url)
        };
        // A program without use for the lighthouse is left in peace.
        assert_eq!(after_silence(&mut waits), None);
        let alone = Member {
            replica_id: "a:1".into(),
            address: "http://a:1".into(),
            store_address: "127.0.0.1:1".into(),
            step: Step(1),
            world_size: 1,
            ..Member::default()
        };
        let client = LighthouseClient::connect_as(None, &url, deadline_in(LONG)).unwrap();
        let asking = {
            let client = client.clone();
            std::thread::spawn(move || client.quorum(&alone, deadline_in(LONG)))
        };
        let until = deadline_in(LONG);
        while client.status(until).unwrap().waiting.is_empty() {
            std::thread::yield_now();
        }
        let text = after_silence(&mut waits).unwrap();
        assert!(
            text.contains("(a:1)") && text.contains("start 1 replica more"),
            "{text}"
        );
        // Not at once again, and ever later.
        assert_eq!(waits.ask(&url), None);
        assert!(waits.pause > SILENCE);
        waits.heard();
        assert_eq!(waits.pause, SILENCE);
        lighthouse.shutdown(deadline_in(LONG)).unwrap();
        asking.join().unwrap().unwrap_err();
        assert_eq!(after_silence(&mut waits), None);
    }
}
