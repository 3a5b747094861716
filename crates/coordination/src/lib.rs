//! Lighthouse and manager servers on torchft's wire; quorum and commit as pure logic.

mod wire;
