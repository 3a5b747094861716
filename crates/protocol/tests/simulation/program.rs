//! The program that trains: the calls of a training loop, and what `Ddp` and `Diloco` do in them, over the real [`Steps`] and [`Rounds`] and a
//! model of a few numbers.
//!
//! A number of the model follows from all that was ever applied to it, so that whatever is left out, applied twice or of another state shows. An
//! inner step adds a number of its own to the local parameters, and an outer gradient is the difference: it names the work in it.

use ftcore::{Error, ErrorKind, Result, Step};
use oxccl_protocol::training::{Due, RoundRules, Rounds, Sends, Share, Steps};

use crate::random::{Scenario, Training, mix};

/// What a fragment of the model holds.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Fragment {
    /// The same on all replicas of a step.
    global: u64,
    /// The replica's own.
    local: u64,
    /// With eager updates: where the local parameters began the round in flight.
    base: u64,
    /// The inner steps, by name, that the next outer gradient has in it.
    inner_steps: Vec<u64>,
}

impl Fragment {
    fn of(global: u64) -> Self {
        Self {
            global,
            local: global,
            base: global,
            inner_steps: Vec::new(),
        }
    }

    /// The replica goes on from these local parameters.
    fn set_local(&mut self, local: u64) {
        (self.local, self.base) = (local, local);
        self.inner_steps.clear();
    }
}

/// What a replica holds, and others may heal from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Model {
    fragments: Vec<Fragment>,
    /// Inner steps made in the round.
    count: u64,
}

impl Model {
    /// What replicas of one step and history have in common.
    pub(crate) fn common(&self) -> u64 {
        self.fragments.iter().fold(1, |h, f| mix(h ^ f.global))
    }

    /// What is the replica's own.
    pub(crate) fn own(&self) -> u64 {
        let own = |h, f: &Fragment| mix(mix(h ^ f.local) ^ f.base);
        self.fragments.iter().fold(self.count, own)
    }
}

/// What an attempt contributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gradient {
    /// Names the work: copies of it have the same name.
    pub(crate) work: u64,
    /// The pieces of work in it, by name: inner steps, or the work itself.
    pub(crate) pieces: Vec<u64>,
    /// The state that it was made of.
    pub(crate) of: u64,
    pub(crate) step: Step,
    fragment: usize,
    /// The inner steps in it, as this process counts them, and how many there must be if that is known.
    from: u64,
    to: u64,
    expected: Option<u64>,
}

/// What the training thread does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Asks for a quorum.
    Attempt,
    /// Waits for what was sent, and votes.
    Vote,
    /// Makes an inner step, or computes the next batch.
    Work,
    /// The run is over.
    Leave,
}

/// What the program is calling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    Begin,
    Step,
    Finish,
}

enum Machine {
    Steps(Steps<Gradient>),
    Rounds(Rounds<Gradient>),
}

pub(crate) struct Program {
    machine: Machine,
    model: Model,
    training: Training,
    /// The training loop ends the run after this step.
    last: Option<Step>,
    call: Call,
    /// A step of data parallel has begun and has not committed.
    is_open: bool,
    /// Names the data of this process.
    salt: u64,
    /// Inner steps made by this process.
    made: u64,
    /// Of each fragment: the inner step after which its local parameters were set last, and how many the next gradient must hold; none after
    /// another state was taken over.
    set: Vec<(u64, Option<u64>)>,
    /// Of each fragment: up to this inner step all have counted in a committed round, or are of another state.
    counted: Vec<u64>,
    /// This attempt's share.
    sent: Option<(Step, Option<Gradient>)>,
    /// Gradients of data parallel were computed in this attempt: with all ranks of the replica, if the model is spread over them.
    pub(crate) has_computed: bool,
    healed: bool,
    /// The next time the state is written, it fails in the middle.
    tears: bool,
    /// It was written in part.
    is_torn: bool,
}

/// Why a commit cannot be.
pub(crate) enum Wrong {
    /// The state was written in part.
    Torn,
    /// A promise is broken.
    Broken(String),
}

impl Program {
    pub(crate) fn new(scenario: &Scenario, value: u64, salt: u64) -> Self {
        let training = scenario.training;
        let last = scenario.last.filter(|_| scenario.says_last);
        let fragments = training.fragments();
        let all = (0..fragments as u64).map(|f| Fragment::of(mix(value ^ f)));
        let machine = match training {
            Training::DataParallel { by_place } => Machine::Steps(Steps::new(last, by_place)),
            Training::Diloco {
                round_steps,
                delay,
                eager,
                ..
            } => Machine::Rounds(Rounds::new(RoundRules {
                round_steps,
                delay,
                eager,
                last,
            })),
        };
        Self {
            machine,
            model: Model {
                fragments: all.collect(),
                count: 0,
            },
            set: (0..fragments as u64)
                .map(|f| (0, Some(training.inner_steps(f + 1))))
                .collect(),
            counted: vec![0; fragments],
            training,
            last: scenario.last,
            call: Call::Begin,
            is_open: false,
            salt,
            made: 0,
            sent: None,
            has_computed: false,
            healed: false,
            tears: false,
            is_torn: false,
        }
    }

    pub(crate) fn common(&self) -> u64 {
        self.model.common()
    }

    pub(crate) fn own(&self) -> u64 {
        self.model.own()
    }

    pub(crate) fn tear(&mut self) {
        self.tears = true;
    }

    /// True if the state was written in part, and no other one since.
    pub(crate) fn is_torn(&self) -> bool {
        self.is_torn
    }

    /// True if it keeps what it computed for a lost attempt.
    pub(crate) fn keeps(&self) -> bool {
        match &self.machine {
            Machine::Steps(steps) => steps.kept().is_some(),
            Machine::Rounds(rounds) => rounds.kept().is_some(),
        }
    }

    /// True if far behind it is a member at once.
    pub(crate) fn joins_at_once(&self) -> bool {
        matches!(self.machine, Machine::Rounds(_))
    }

    pub(crate) fn is_last(&self, step: Step) -> bool {
        match &self.machine {
            Machine::Steps(steps) => steps.is_last(step),
            Machine::Rounds(rounds) => rounds.is_last(step),
        }
    }

    /// The members of this step close the run with it.
    pub(crate) fn closes_with(&mut self, step: Step) {
        match &mut self.machine {
            Machine::Steps(steps) => steps.closes_with(step),
            Machine::Rounds(rounds) => rounds.closes_with(step),
        }
    }

    /// The program makes its next call, or the same again after one that failed. Errors: the program ends.
    pub(crate) fn calls(&mut self, step: Step) -> Result<Turn> {
        let over = match self.machine {
            Machine::Steps(_) => self.last.is_some_and(|last| step >= last),
            Machine::Rounds(_) => self.last.is_some_and(|last| step > last),
        };
        match &mut self.machine {
            Machine::Steps(steps) => {
                if over && !steps.closing_is_due(step) {
                    steps.close()?;
                    return Ok(Turn::Leave);
                }
                steps.begin(over)?;
                self.is_open = true;
            }
            Machine::Rounds(rounds) => {
                // Some programs forget to begin. It is refused, and nothing has changed.
                if self.call == Call::Begin
                    && self.made == 0
                    && self.salt.is_multiple_of(4)
                    && rounds.inner_step().is_ok()
                {
                    self.call = Call::Step;
                }
                match self.call {
                    Call::Begin => rounds.begin()?,
                    Call::Step => rounds.inner_step()?,
                    Call::Finish => rounds.close()?,
                }
            }
        }
        self.turn(step)
    }

    /// The training loop has computed for a while.
    pub(crate) fn works(&mut self, step: Step) -> Result<Turn> {
        self.made += 1;
        let data = mix(self.salt ^ self.made);
        for (f, fragment) in (0..).zip(&mut self.model.fragments) {
            fragment.local = fragment.local.wrapping_add(mix(data ^ f));
            fragment.inner_steps.push(data);
        }
        if let Machine::Rounds(rounds) = &mut self.machine {
            // Some programs begin twice. It is refused, and nothing has changed.
            if data.is_multiple_of(8) && rounds.begin().is_ok() {
                self.call = Call::Begin;
            }
        }
        self.calls(step)
    }

    /// What comes next in the present call, or after it.
    pub(crate) fn turn(&mut self, step: Step) -> Result<Turn> {
        loop {
            let rounds = match &mut self.machine {
                Machine::Steps(_) if self.is_open => return Ok(Turn::Attempt),
                Machine::Steps(_) if self.last.is_some_and(|last| step >= last) => return self.calls(step),
                Machine::Steps(_) => return Ok(Turn::Work),
                Machine::Rounds(rounds) => rounds,
            };
            match (rounds.due(), self.call) {
                (Some(Due::Send), _) => return Ok(Turn::Attempt),
                (Some(Due::Finish), _) => return Ok(Turn::Vote),
                (None, Call::Begin) => {
                    rounds.begun();
                    self.call = Call::Step;
                }
                (None, Call::Step) if self.last.is_some_and(|last| step > last) => {
                    rounds.close()?;
                    self.call = Call::Finish;
                }
                (None, Call::Step) => return Ok(Turn::Work),
                (None, Call::Finish) => return Ok(Turn::Leave),
            }
        }
    }

    /// There is a quorum, which has come up or not: what this replica brings to its reduction. `None`: there is none. Errors: the program ends.
    pub(crate) fn joined(&mut self, share: Share) -> Result<Option<Option<Gradient>>> {
        let fragment = self.training.fragment_at(share.step);
        let sends = match &mut self.machine {
            Machine::Steps(steps) => steps.joined(&share)?,
            Machine::Rounds(rounds) => {
                if rounds.drops_inherited() {
                    let all = self.model.fragments.iter_mut().enumerate();
                    all.filter(|(f, _)| *f != fragment)
                        .for_each(|(_, part)| part.set_local(part.global));
                }
                rounds.joined(share.step)?
            }
        };
        self.has_computed = sends == Sends::Fresh && matches!(self.machine, Machine::Steps(_));
        if sends == Sends::Fresh {
            let gradient = self.gradient(fragment, share);
            match &mut self.machine {
                Machine::Steps(steps) => steps.keep(&share, gradient),
                Machine::Rounds(rounds) => rounds.keep(share.step, gradient),
            }
        }
        let brings = match (&mut self.machine, sends) {
            (_, Sends::Nothing) => None,
            (_, Sends::Zeros) => Some(None),
            (Machine::Steps(steps), _) => Some(steps.kept().cloned()),
            (Machine::Rounds(rounds), _) => Some(rounds.kept().cloned()),
        };
        let brings = brings.map(|g| g.filter(|_| share.contributor_rank.is_some()));
        if let Machine::Rounds(rounds) = &mut self.machine {
            rounds.sent();
        }
        if sends == Sends::Fresh && self.training.is_eager() {
            self.look_ahead(fragment, brings.iter().flatten().next().map_or(0, |g| g.work));
        }
        self.sent = Some((share.step, brings.clone().flatten()));
        Ok(brings)
    }

    fn gradient(&self, fragment: usize, share: Share) -> Gradient {
        let part = &self.model.fragments[fragment];
        let work = match self.training {
            // The samples follow from the place among the contributors, or are the replica's own.
            Training::DataParallel { by_place } => {
                let samples = if by_place {
                    u64::from(share.contributor_rank.unwrap_or(0))
                } else {
                    mix(self.salt)
                };
                mix(part.global ^ samples)
            }
            Training::Diloco { eager, .. } => {
                let from = if eager { part.base } else { part.global };
                mix(from.wrapping_sub(part.local))
            }
        };
        let pieces = match self.training {
            Training::DataParallel { .. } => vec![work],
            Training::Diloco { .. } => part.inner_steps.clone(),
        };
        Gradient {
            work,
            pieces,
            of: part.global,
            step: share.step,
            fragment,
            from: self.set[fragment].0,
            to: self.made,
            expected: self.set[fragment].1,
        }
    }

    /// With eager updates the local parameters go on from what this replica's own part alone would make.
    fn look_ahead(&mut self, fragment: usize, own: u64) {
        let part = &mut self.model.fragments[fragment];
        part.set_local(mix(part.global ^ own));
        self.is_set(fragment);
    }

    /// The local parameters of `fragment` were set now.
    fn is_set(&mut self, fragment: usize) {
        // One that healed into a round may have been let off inner steps of it.
        let whole = self.training.inner_steps(self.training.fragments() as u64);
        let short = self.healed && self.training.is_eager();
        self.set[fragment] = (self.made, (!short).then_some(whole));
    }

    /// The share of the state that a contribution must be of.
    pub(crate) fn present(&self, step: Step) -> u64 {
        self.model.fragments[self.training.fragment_at(step)].global
    }

    /// The state, if there is one to offer.
    pub(crate) fn offer(&self) -> Result<Model> {
        match &self.machine {
            Machine::Steps(steps) => steps.check_state()?,
            Machine::Rounds(rounds) => rounds.check_state()?,
        }
        let count = match &self.machine {
            Machine::Steps(_) => 0,
            Machine::Rounds(rounds) => rounds.count(false),
        };
        Ok(Model {
            count,
            ..self.model.clone()
        })
    }

    /// Writing a part of the state ends with an error, if that is to happen now.
    fn tears_now(&mut self) -> Result<()> {
        if !std::mem::take(&mut self.tears) {
            return Ok(());
        }
        self.is_torn = true;
        let part = &mut self.model.fragments[0];
        (part.global, part.local) = (mix(part.global ^ 99), mix(part.local ^ 99));
        Err(Error::new(ErrorKind::Io, "the device is gone"))
    }

    /// Takes another state over.
    pub(crate) fn loads(&mut self, model: &Model) -> Result<()> {
        let written = self.tears_now();
        if written.is_ok() {
            self.model = model.clone();
            self.is_torn = false;
            self.healed = true;
            self.set.fill((self.made, None));
            self.counted.fill(self.made);
        }
        match &mut self.machine {
            Machine::Steps(steps) => steps.loaded(written),
            Machine::Rounds(rounds) => rounds.loaded(model.count, written),
        }
    }

    /// True if this replica's contribution to the present step is a copy of another one's work.
    pub(crate) fn is_copy(&self) -> bool {
        // In data parallel it computes gradients of its own on the state that it took over.
        self.healed && matches!(self.machine, Machine::Rounds(_))
    }

    /// The attempt was lost.
    pub(crate) fn lost(&mut self) {
        if let Machine::Rounds(rounds) = &mut self.machine {
            rounds.lost();
        }
    }

    /// The attempt committed, with the `result` of its reduction if it had one.
    pub(crate) fn committed(&mut self, result: Option<u64>) -> std::result::Result<(), Wrong> {
        let (step, own) = self.sent.take().unwrap_or_default();
        let fragment = self.training.fragment_at(step);
        if let Some(own) = own {
            self.counts_once(step, fragment, own).map_err(Wrong::Broken)?;
        }
        let made = match &self.machine {
            Machine::Rounds(rounds) if self.training.is_eager() => rounds.kept().map(|g| g.to),
            _ => Some(self.made),
        };
        if let Some(made) = made.filter(|_| result.is_some()) {
            self.counted[fragment] = made;
        }
        let written = self.tears_now();
        if let (Some(result), Ok(())) = (result, &written) {
            let eager = self.training.is_eager();
            let part = &mut self.model.fragments[fragment];
            part.global = mix(part.global ^ result);
            if !eager {
                part.set_local(part.global);
                self.is_set(fragment);
            }
        }
        self.is_open = false;
        self.healed = false;
        let applied = match &mut self.machine {
            Machine::Steps(steps) => steps.applied(written),
            Machine::Rounds(rounds) => rounds.applied(written),
        };
        applied.map_err(|_| Wrong::Torn)
    }

    /// Every inner step counts in one committed round of each fragment, in the first that begins after it.
    fn counts_once(&self, step: Step, fragment: usize, own: Gradient) -> std::result::Result<(), String> {
        if !matches!(self.machine, Machine::Rounds(_)) {
            return Ok(());
        }
        if (own.fragment, own.step) != (fragment, step) {
            return Err(format!(
                "INV-4: an outer gradient of step {} counts in step {step}",
                own.step
            ));
        }
        let (counted, made) = (self.counted[fragment], own.to - own.from);
        if own.from != counted {
            return Err(format!(
                "INV-4: inner steps {} to {} count in step {step}, and those up to {counted} have counted before",
                own.from + 1,
                own.to
            ));
        }
        match own.expected.filter(|e| *e != made) {
            Some(e) => Err(format!(
                "{made} inner steps count in step {step}, and the fragment's rounds have {e}"
            )),
            None => Ok(()),
        }
    }
}
