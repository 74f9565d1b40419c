//! Attention over caches in pages: attention over the tokens that `gather_pages` reads from them.

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::mesh::AxisId;
use crate::ops::attention::{FORWARD, infer};
use crate::ops::check::refuse;
use crate::ops::context::Types;
use crate::ops::error::{OpError, ensure};
use crate::ops::table::attention::Attention;
use crate::ops::table::cache::Cache;
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

/// The operand with the table of pages, after q, k, v and the positions of first queries.
pub const TABLE: usize = FORWARD + 1;

impl Attention {
    /// The most rows, queries of the heads that share a key, of an attention that reads keys where they are in pages: each
    /// key is read once for all of them. More rows are worth a copy, which is read tile by tile.
    pub const FEW_ROWS: u64 = 16;

    /// The widest rows of keys and values of such an attention.
    pub const WIDEST_ROW: u64 = 256;

    fn is_plain(&self) -> bool {
        self.starts && !self.wraps && self.bias.is_none() && self.movement.is_none()
    }

    /// The operation that gathers keys, values or scales from pages.
    pub fn gather(&self, [pages, slots]: [DimId; 2]) -> Cache {
        Cache::GatherPages { pages, slots, over: self.keys, beyond: None }
    }

    /// Whether an attention over gathered pages may read them itself.
    pub fn may_read_pages(&self, space: &Space, v: &TensorType) -> bool {
        let group = space.size(self.heads) / space.size(self.kv_heads).max(1);
        let rows = space.size(self.queries).saturating_mul(group);
        let widest = space.size(self.width).max(space.size(self.value_width(v)));
        self.is_plain() && rows <= Self::FEW_ROWS && widest <= Self::WIDEST_ROW
    }

    /// The operands of the attention that `attend_pages` with these operands is.
    ///
    /// # Errors
    /// `V01`, `V04`, `V05`, `V07` where pages and table do not fit.
    pub fn gathered(
        &self,
        space: &Space,
        paged: [DimId; 2],
        operands: &[&TensorType],
    ) -> Result<Types, OpError> {
        let (gather, table) = (self.gather(paged), operands[TABLE]);
        let of_pages = |ty: &TensorType| {
            let mut types = gather.infer(space, &[ty, table])?;
            let rule = gather.rule(&[ty, table], &[&types[0]]);
            let layouts =
                rule.results(&[ty, table]).map_err(|violation| refuse("attend_pages", space, violation))?;
            types.iter_mut().zip(layouts).for_each(|(ty, layout)| ty.layout = layout);
            Ok(types.remove(0))
        };
        let others = operands.iter().enumerate().filter(|(i, _)| *i != TABLE);
        others.map(|(i, ty)| if i == 0 || i == FORWARD { Ok((*ty).clone()) } else { of_pages(ty) }).collect()
    }

    /// `of` the operands by [`gathered`](Self::gathered), of a verified operation.
    pub fn of_gathered<T>(
        &self,
        space: &Space,
        paged: [DimId; 2],
        operands: &[&TensorType],
        of: impl FnOnce(&[&TensorType]) -> T,
    ) -> T {
        let types = self.gathered(space, paged, operands).expect("the operation is verified");
        of(&types.iter().collect::<SmallVec<[&TensorType; 8]>>())
    }

    pub(in crate::ops) fn infer_pages(
        &self,
        paged: [DimId; 2],
        space: &Space,
        operands: &[&TensorType],
    ) -> Result<Types, OpError> {
        let message = "`attend_pages` has first positions, and neither a ring, a bias nor a movement";
        ensure!(self.is_plain(), "V05", "{message}");
        let types = self.gathered(space, paged, operands)?;
        infer(self, space, &types.iter().collect::<SmallVec<[&TensorType; 8]>>())
    }
}

impl Op {
    /// An attention, and the axes that split its keys, the second operand.
    pub fn attention_of<'a>(&'a self, k: &'a TensorType) -> Option<(&'a Attention, &'a [AxisId])> {
        match self {
            Op::Attention(attention) | Op::AttentionBackward(attention) => {
                Some((attention, k.axes_of(attention.keys)))
            }
            Op::AttendPages { attention, slots, .. } => Some((attention, k.axes_of(*slots))),
            _ => None,
        }
    }
}
