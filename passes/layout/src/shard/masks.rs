//! Lays out masks of dropout: each is drawn in the layout of the tensor that it applies to.
//!
//! A mask has the same elements in every layout, so it is drawn in that of the tensor beside it and never travels.

use ithaca_ir::layout::Layout;
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Op, OpError, Random};

use super::rewriter::{Outside, Rewriter};

impl Rewriter<'_, '_> {
    /// Whether `node` draws a mask; then that is deferred until the tensor that it applies to is known.
    pub(super) fn defers_mask(&mut self, node: &Node) -> Result<bool, OpError> {
        let Op::Random(Random::DropoutMask { .. }) = node.op else { return Ok(false) };
        let key = self.value(node.operands[0])?;
        self.masks.insert(node.result(), (key, node.op.clone()));
        self.map.insert(node.result(), key);
        Ok(true)
    }

    /// Draws the mask that `node` drops by, in the layout of its tensor; a mask that is taken in parts, in the layout of
    /// tokens between functions.
    pub(super) fn draw_beside(&mut self, node: &Node) -> Result<(), OpError> {
        if let (Op::Take { .. }, &[mask]) = (&node.op, &node.operands[..])
            && self.masks.contains_key(&mask)
        {
            let layout = self.by_sequence(self.source.ty(mask), Outside::Residual).layout;
            return self.draw(mask, layout);
        }
        let (Op::Random(Random::Dropout { .. }), &[x, mask]) = (&node.op, &node.operands[..]) else {
            return Ok(());
        };
        if self.masks.contains_key(&mask) {
            let x = self.value(x)?;
            let layout = self.found(x).layout.located(None);
            self.draw(mask, layout)?;
        }
        Ok(())
    }

    /// Draws a mask that was put off.
    pub(super) fn draw(&mut self, mask: ValueId, layout: Layout) -> Result<(), OpError> {
        let Some((key, op)) = self.masks.remove(&mask) else { return Ok(()) };
        let ty = self.source.ty(mask).with_layout(layout);
        let drawn = self.b.push_as(op, &[key], ty)?;
        self.b.name(drawn, self.source.values[mask].name.as_deref());
        self.map.insert(mask, drawn);
        Ok(())
    }
}
