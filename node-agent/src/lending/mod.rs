//! Rings over several machines without a cluster. A machine's owner lends it (`prima agent`, which is `prima-node-agent lend`), and `prima run`
//! on another machine borrows it (`prima-node-agent borrow`): it asks what the machine can do, measures the links, sends the plan and the part
//! of the model that the member runs, and follows the member until the ring ends.
//!
//! `word` and `door` decide who may borrow: whoever has the word that the agent shows, once, and then whoever has that one's key. `known` is
//! what is remembered of that. `lend` and `guest` are the lender's side, `borrow` and `send` the borrower's; `proto` is what they say.
//!
//! Refuses: to let a borrower choose what is run (it is this program's `serve`), where its model lies, or how much memory it may take: that is
//! for the machine's owner.

pub mod borrow;
mod door;
mod guest;
mod known;
pub mod lend;
mod proto;
mod send;
mod word;

/// Bytes of a model's file in one message.
const CONTENT_BYTES: usize = 2 << 20;
/// The largest message: content, or the plan of a large ring.
const MAX_MESSAGE_BYTES: usize = CONTENT_BYTES + (1 << 20);
