package natslog;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.GeneralSecurityException;
import java.security.KeyFactory;
import java.security.KeyStore;
import java.security.PrivateKey;
import java.security.cert.Certificate;
import java.security.cert.CertificateFactory;
import java.security.spec.InvalidKeySpecException;
import java.security.spec.PKCS8EncodedKeySpec;
import java.util.Base64;
import java.util.Collection;
import javax.net.ssl.KeyManagerFactory;
import javax.net.ssl.SSLContext;
import javax.net.ssl.TrustManagerFactory;

/** TLS from PEM files. */
final class Tls {
  private Tls() {}

  /** Any of the files may be null, the certificate and its key together. */
  static SSLContext context(String caFile, String certFile, String keyFile) {
    if ((certFile == null) != (keyFile == null)) {
      throw NatslogException.config(
          "the TLS client certificate and its key belong together: give both files, or none");
    }
    try {
      if (caFile == null && certFile == null) {
        return SSLContext.getDefault();
      }
      TrustManagerFactory trust = null;
      if (caFile != null) {
        KeyStore store = empty();
        int number = 0;
        for (Certificate one : certificates(caFile)) {
          store.setCertificateEntry("ca" + number++, one);
        }
        trust = TrustManagerFactory.getInstance(TrustManagerFactory.getDefaultAlgorithm());
        trust.init(store);
      }
      KeyManagerFactory keys = null;
      if (certFile != null) {
        KeyStore store = empty();
        store.setKeyEntry("key", key(keyFile), new char[0], certificates(certFile).toArray(new Certificate[0]));
        keys = KeyManagerFactory.getInstance(KeyManagerFactory.getDefaultAlgorithm());
        keys.init(store, new char[0]);
      }
      SSLContext context = SSLContext.getInstance("TLS");
      context.init(
          keys == null ? null : keys.getKeyManagers(), trust == null ? null : trust.getTrustManagers(), null);
      return context;
    } catch (GeneralSecurityException | IOException | IllegalArgumentException error) {
      throw NatslogException.config(
          "the TLS files cannot be used: " + error.getMessage() + " (certificates and a PKCS#8 key, as PEM)");
    }
  }

  private static KeyStore empty() throws GeneralSecurityException, IOException {
    KeyStore store = KeyStore.getInstance("PKCS12");
    store.load(null, null);
    return store;
  }

  private static Collection<? extends Certificate> certificates(String file)
      throws GeneralSecurityException, IOException {
    byte[] pem = Files.readAllBytes(Path.of(file));
    return CertificateFactory.getInstance("X.509").generateCertificates(new ByteArrayInputStream(pem));
  }

  private static PrivateKey key(String file) throws GeneralSecurityException, IOException {
    String pem = Files.readString(Path.of(file));
    int start = pem.indexOf("-----BEGIN PRIVATE KEY-----");
    int end = pem.indexOf("-----END PRIVATE KEY-----");
    if (start < 0 || end < start) {
      throw new IOException(file + " has no section PRIVATE KEY: convert it with openssl pkcs8 -topk8 -nocrypt");
    }
    String text = pem.substring(start + "-----BEGIN PRIVATE KEY-----".length(), end);
    PKCS8EncodedKeySpec spec = new PKCS8EncodedKeySpec(Base64.getMimeDecoder().decode(text));
    for (String algorithm : new String[] {"RSA", "EC", "Ed25519"}) {
      try {
        return KeyFactory.getInstance(algorithm).generatePrivate(spec);
      } catch (InvalidKeySpecException error) {
        continue; // it is a key of another algorithm
      }
    }
    throw new IOException(file + " has a key of an unknown algorithm");
  }
}
