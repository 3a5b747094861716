//! What receiver and source tell each other before the state itself: two messages of a fixed size, little-endian.

use ftcore::{Epoch, Error, ErrorKind, Result, Step, Tensor};

use crate::SnapshotId;

/// Raised when a receiver of one build could not read what a source of another sends.
const VERSION: u32 = 1;
const BYTES: usize = 64;

/// Which state; the lineage by its hash, so that it has a fixed size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Named {
    step: Step,
    epoch: Epoch,
    /// Zeros: any.
    lineage: [u8; 32],
}

impl Named {
    pub(super) fn of(step: Step, epoch: Epoch, lineage: Option<&str>) -> Self {
        let lineage = lineage.map_or([0; 32], |l| *blake3::hash(l.as_bytes()).as_bytes());
        Self { step, epoch, lineage }
    }

    pub(super) fn of_snapshot(id: &SnapshotId) -> Self {
        Self::of(id.step, id.epoch, Some(&id.lineage))
    }

    /// True if a state of that name is one that `self` asks for.
    pub(super) fn takes(&self, held: &Self) -> bool {
        (self.step, self.epoch) == (held.step, held.epoch)
            && (self.lineage == [0; 32] || self.lineage == held.lineage)
    }

    /// Why `held` is not what `self` asks for.
    pub(super) fn instead(&self, held: &Self) -> String {
        let lineage = if (self.step, self.epoch) == (held.step, held.epoch) {
            " with another lineage"
        } else {
            ""
        };
        format!(
            "it holds step {} of epoch {}{lineage}, asked for {} of epoch {}",
            held.step, held.epoch, self.step, self.epoch
        )
    }
}

/// What a receiver asks a source for; `None`: nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ask(pub(super) Option<Named>);

/// A source's answer. The state follows only if it is the one that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) holds: Named,
    pub(super) manifest_bytes: u64,
}

impl Ask {
    pub(super) fn write(&self) -> Tensor {
        write(u32::from(self.0.is_some()), self.0, 0)
    }

    pub(super) fn read(tensor: &Tensor) -> Result<Self> {
        let (wants, named, _) = read(tensor)?;
        Ok(Self((wants == 1).then_some(named)))
    }
}

impl Head {
    pub(super) fn write(&self) -> Tensor {
        write(0, Some(self.holds), self.manifest_bytes)
    }

    pub(super) fn read(tensor: &Tensor) -> Result<Self> {
        let (_, holds, manifest_bytes) = read(tensor)?;
        Ok(Self {
            holds,
            manifest_bytes,
        })
    }
}

/// Room for either.
pub(super) fn room() -> Tensor {
    Tensor::from_vec(vec![0u8; BYTES])
}

fn write(flag: u32, named: Option<Named>, length: u64) -> Tensor {
    let named = named.unwrap_or_else(|| Named::of(Step(0), Epoch(0), None));
    let mut bytes = Vec::with_capacity(BYTES);
    bytes.extend_from_slice(&VERSION.to_le_bytes());
    bytes.extend_from_slice(&flag.to_le_bytes());
    bytes.extend_from_slice(&named.step.0.to_le_bytes());
    bytes.extend_from_slice(&named.epoch.0.to_le_bytes());
    bytes.extend_from_slice(&named.lineage);
    bytes.extend_from_slice(&length.to_le_bytes());
    Tensor::from_vec(bytes)
}

fn read(tensor: &Tensor) -> Result<(u32, Named, u64)> {
    fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
        let (first, rest) = from.split_first_chunk::<N>()?;
        *from = rest;
        Some(*first)
    }
    let refused = |text: String| Error::new(ErrorKind::Protocol, text);
    let mut from = tensor.bytes();
    let mut fields = || {
        Some((
            u32::from_le_bytes(take(&mut from)?),
            u32::from_le_bytes(take(&mut from)?),
            Named {
                step: Step(i64::from_le_bytes(take(&mut from)?)),
                epoch: Epoch(u64::from_le_bytes(take(&mut from)?)),
                lineage: take(&mut from)?,
            },
            u64::from_le_bytes(take(&mut from)?),
        ))
    };
    let (version, flag, named, length) =
        fields().ok_or_else(|| refused("a message about a state is too short".into()))?;
    if version != VERSION {
        return Err(refused(format!(
            "a message of version {version} about a state; this build reads {VERSION}"
        )));
    }
    Ok((flag, named, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_are_written_and_those_of_another_version_refused() {
        let named = Named::of(Step(7), Epoch(3), Some("ab"));
        for ask in [Ask(Some(named)), Ask(None)] {
            assert_eq!(Ask::read(&ask.write()).unwrap(), ask);
        }
        let head = Head {
            holds: named,
            manifest_bytes: 99,
        };
        assert_eq!(head.write().byte_len(), room().byte_len());
        assert_eq!(Head::read(&head.write()).unwrap(), head);
        let mut other = head.write();
        other.bytes_mut()[0] = 9;
        let e = Head::read(&other).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::Protocol, "{e}");
        assert!(Ask::read(&Tensor::from_vec(vec![1u8; 10])).is_err());
    }

    #[test]
    fn a_state_is_taken_if_step_epoch_and_lineage_are_those_that_are_asked_for() {
        let held = Named::of(Step(7), Epoch(3), Some("ab"));
        assert!(
            Named::of(Step(7), Epoch(3), Some("ab")).takes(&held)
                && Named::of(Step(7), Epoch(3), None).takes(&held)
        );
        for (other, text) in [
            (
                Named::of(Step(8), Epoch(3), None),
                "holds step 7 of epoch 3, asked for 8 of epoch 3",
            ),
            (
                Named::of(Step(7), Epoch(4), None),
                "holds step 7 of epoch 3, asked for 7 of epoch 4",
            ),
            (Named::of(Step(7), Epoch(3), Some("b")), "with another lineage"),
        ] {
            assert!(!other.takes(&held));
            assert!(other.instead(&held).contains(text), "{}", other.instead(&held));
        }
    }
}
