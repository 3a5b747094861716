//! The step protocol, from the lighthouse to the rank, without IO, clock, threads or runtime.
//!
//! Each part is a state machine: an event and the present time go in, actions come out, and the same events give the same
//! actions. `coordination` and `manager` are thin shells that carry the actions out; `tests/simulation` runs all parts
//! together under virtual time.
//!
//! - [`quorum`]: the lighthouse. Which replicas form the next epoch.
//! - [`gather`] and [`commit`]: the manager server. One quorum request and one vote out of those of a replica's ranks.
//! - [`assignment`]: what a rank does in a quorum, who heals from whom, and who contributes.
//! - [`rank`]: a rank's way through a step.
//! - [`replica`]: the manager server. Gathering, votes, and whether all ranks of the replica are there.
//! - [`ends`]: what a rank does with the notice that its epoch is over.
//! - [`source`]: which source the ranks of one replica heal from.
//! - [`training`]: what data parallel and DiLoCo do around the attempts of their rank.
//! - [`Lineage`]: the history that led to a state.

pub mod assignment;
pub mod commit;
pub mod ends;
pub mod gather;
mod lineage;
mod member;
pub mod quorum;
pub mod rank;
pub mod replica;
pub mod source;
mod told;
pub mod training;

pub use assignment::QuorumResult;
pub use lineage::Lineage;
pub use member::{AbortEpoch, Joining, MAX_ID_BYTES, Member, Quorum};
pub use told::Told;
