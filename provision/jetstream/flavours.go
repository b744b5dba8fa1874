package jetstream

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// probeName begins the name of every value that a probe writes. The rest is
// random: the provider and the consumer probe one bucket at the same time.
const probeName = "meshd-probe-"

const probeValue = "meshd"

func kvFlavour() flavour {
	return flavour{
		name: "kv-bucket", typ: "nats-kv", prefix: "KV_",
		ensure: ensureKV, probe: probeKV, values: countKeys,
	}
}

func ensureKV(ctx context.Context, js jetstream.JetStream, bucket, mark string, maxBytes int64) error {
	cfg := jetstream.KeyValueConfig{
		Bucket: bucket, Description: mark, MaxBytes: maxBytes,
		History: 1, Storage: jetstream.FileStorage,
	}
	kv, err := js.KeyValue(ctx, bucket)
	if errors.Is(err, jetstream.ErrBucketNotFound) {
		_, err = js.CreateKeyValue(ctx, cfg)
		return err
	} else if err != nil {
		return err
	}
	status, err := kv.Status(ctx)
	if err != nil {
		return err
	}
	// A longer history, set by hand, holds values that a shorter one would drop.
	cfg.History = status.Config().History
	_, err = js.UpdateKeyValue(ctx, cfg)
	return err
}

func probeKV(ctx context.Context, js jetstream.JetStream, bucket string) error {
	kv, err := js.KeyValue(ctx, bucket)
	if err != nil {
		return fault("open bucket "+bucket, err)
	}
	key := probeName + rand.Text()
	if _, err := kv.PutString(ctx, key, probeValue); err != nil {
		return fault("write to bucket "+bucket, err)
	}
	entry, err := kv.Get(ctx, key)
	if err == nil && string(entry.Value()) != probeValue {
		err = errors.New("the value read is not the one written")
	}
	if err != nil {
		return fault("read from bucket "+bucket, err)
	}
	if err := kv.Delete(ctx, key); err != nil {
		return fault("delete from bucket "+bucket, err)
	}
	if err := sweep(ctx, js, "KV_"+bucket, "$KV."+bucket+"."+key); err != nil {
		return fault("clean bucket "+bucket, err)
	}
	return nil
}

func countKeys(ctx context.Context, stream jetstream.Stream, _ string) (uint64, error) {
	about, err := stream.Info(ctx)
	if err != nil {
		return 0, err
	}
	return about.State.NumSubjects, nil
}

func objectFlavour() flavour {
	return flavour{
		name: "object-bucket", typ: "nats-object", prefix: "OBJ_",
		ensure: ensureObjects, probe: probeObjects, values: countObjects,
	}
}

func ensureObjects(ctx context.Context, js jetstream.JetStream, bucket, mark string, maxBytes int64) error {
	_, err := js.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{
		Bucket: bucket, Description: mark, MaxBytes: maxBytes, Storage: jetstream.FileStorage,
	})
	return err
}

func probeObjects(ctx context.Context, js jetstream.JetStream, bucket string) error {
	store, err := js.ObjectStore(ctx, bucket)
	if err != nil {
		return fault("open bucket "+bucket, err)
	}
	name := probeName + rand.Text()
	meta := "$O." + bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
	if err := putObject(ctx, js, bucket, name, meta); err != nil {
		return fault("write to bucket "+bucket, err)
	}
	value, err := store.GetString(ctx, name)
	if err == nil && value != probeValue {
		err = errors.New("the value read is not the one written")
	}
	if err != nil {
		return fault("read from bucket "+bucket, err)
	}
	if err := store.Delete(ctx, name); err != nil {
		return fault("delete from bucket "+bucket, err)
	}
	if err := sweep(ctx, js, "OBJ_"+bucket, meta); err != nil {
		return fault("clean bucket "+bucket, err)
	}
	return nil
}

// putObject writes a small object as ObjectStore.Put does, one piece and its
// description (ADR-20 of NATS), but waits for each. Put may leave a goroutine
// behind for ever: nats.go 1.55 forgets its status channel when Put returns, and
// the goroutine that Put started may read the channel only after that. A node
// checks its bindings for as long as it runs.
func putObject(ctx context.Context, js jetstream.JetStream, bucket, name, meta string) error {
	piece := rand.Text()
	if _, err := js.Publish(ctx, "$O."+bucket+".C."+piece, []byte(probeValue)); err != nil {
		return err
	}
	digest := sha256.New()
	digest.Write([]byte(probeValue))
	text, err := json.Marshal(jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name},
		Bucket:     bucket, NUID: piece, Size: uint64(len(probeValue)), Chunks: 1,
		Digest: jetstream.GetObjectDigestValue(digest),
	})
	if err != nil {
		return err
	}
	m := nats.NewMsg(meta)
	m.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	m.Data = text
	_, err = js.PublishMsg(ctx, m)
	return err
}

func countObjects(ctx context.Context, stream jetstream.Stream, bucket string) (uint64, error) {
	about, err := stream.Info(ctx, jetstream.WithSubjectFilter("$O."+bucket+".M.>"))
	if err != nil {
		return 0, err
	}
	return uint64(len(about.State.Subjects)), nil
}

// sweep removes the deletion marker that a probe left.
func sweep(ctx context.Context, js jetstream.JetStream, stream, subject string) error {
	s, err := js.Stream(ctx, stream)
	if err != nil {
		return fmt.Errorf("open stream: %w", err)
	}
	return s.Purge(ctx, jetstream.WithPurgeSubject(subject))
}
