package consensus

import "github.com/hashicorp/raft"

// A voter of the library refuses its vote to whoever is no voter in its own newest configuration. That
// can stop a mesh for ever: a leader gives c a vote, c and the leader have the entry, b has not yet, and
// the leader dies. c needs the vote of b, which knows c as a learner; b needs that of c, whose log is
// newer. Two of three voters live, and none can be elected.
//
// Raft itself needs no such rule: a vote is decided by term and log alone, and a server must grant it
// "without consulting its current configuration" (Ongaro's dissertation, 4.1). The rule is there
// against nodes that were demoted or removed and do not know it. Those have older logs than the
// voters. So it is lifted for a candidate whose log is newer than ours, where we have no leader.
type ballot struct {
	raft *raft.Raft
	logs raft.LogStore
	self raft.ServerID
}

// overdue reports whether the library would refuse a candidate that our configuration should name as
// a voter, for all we can tell.
func (b *ballot) overdue(id raft.ServerID, lastTerm, lastIndex uint64, transfer bool) bool {
	if _, leader := b.raft.LeaderWithID(); leader != "" && !transfer {
		return false
	}
	f := b.raft.GetConfiguration()
	if f.Error() != nil || len(f.Configuration().Servers) == 0 {
		return false
	}
	for _, s := range f.Configuration().Servers {
		if s.ID == id && s.Suffrage == raft.Voter {
			return false
		}
	}
	var last raft.Log
	if err := b.logs.GetLog(b.raft.LastIndex(), &last); err != nil {
		return false
	}
	return lastTerm > last.Term || lastTerm == last.Term && lastIndex > last.Index
}

// take looks at an inbound RPC before the library does, and reports whether it has answered it. A vote
// is left to the library, without the candidate's id, for which it then looks up nothing; term, log
// and earlier votes it checks as ever. A pre-vote binds nobody, and is answered here.
func (b *ballot) take(rpc raft.RPC) bool {
	switch req := rpc.Command.(type) {
	case *raft.RequestVoteRequest:
		if b.overdue(raft.ServerID(req.ID), req.LastLogTerm, req.LastLogIndex, req.LeadershipTransfer) {
			req.ID = nil
		}
	case *raft.RequestPreVoteRequest:
		if req.Term < b.raft.CurrentTerm() || !b.overdue(raft.ServerID(req.ID), req.LastLogTerm, req.LastLogIndex, false) {
			return false
		}
		rpc.Respond(&raft.RequestPreVoteResponse{
			RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: []byte(b.self), Addr: []byte(b.self)},
			Term:      req.Term,
			Granted:   true,
		}, nil)
		return true
	}
	return false
}
